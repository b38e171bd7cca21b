"""Whether an instance goes where a request's bootstrap fields, or an order to move requests, say.

For bootstrap fields, in requests that a router has signed or not:

| address | cluster secret | signed, or on --allow-bootstrap | |
|---|---|---|---|
| loopback | no | – | followed |
| other | no | no | refused |
| any | either | on --allow-bootstrap | followed |
| any | yes | signed | followed |
| any | yes | no | refused |

A router removes such fields from its clients' requests, so those that it signs are its own. ``--insecure-cluster``
without a secret follows any. Orders (``POST /migrate``, ``/drain``) come from admins, signed or not: they may
name loopback addresses, and those of ``--allow-bootstrap`` and ``--drain-to``.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....messages.decode import shown
from ....runtime.cluster_secret import ClusterSecret, addresses
from ....runtime.web.ports import means_this_host
from ...options import ServerOptions
from ..bodies.request_fields import RequestFields


class BootstrapGate:
    """Decides which bootstrap addresses and move targets one instance follows."""

    def __init__(self, options: ServerOptions) -> None:
        secret = ClusterSecret.read(options.cluster_secret_file)
        self._has_secret = secret is not None
        self._follows_all = options.insecure_cluster and secret is None
        self._allowed = addresses("--allow-bootstrap", options.allow_bootstrap)
        self._targets = self._allowed | addresses("--drain-to", options.drain_to)
        self.default_port = options.default_bootstrap_port

    def refusal(self, fields: RequestFields) -> str:
        """Return why the bootstrap addresses of ``fields`` must not be followed, "" if they may."""
        addresses = self._addresses(fields)
        if self._follows_all or addresses <= self._allowed:
            return ""
        if not self._has_secret:
            if all(means_this_host(host) for host, _ in addresses - self._allowed):
                return ""
            return (
                "without a cluster secret only loopback addresses are followed; start router and instances with "
                "--cluster-secret-file, or this instance with --allow-bootstrap HOST:PORT"
            )
        if fields.is_signed:
            return ""
        return (
            "only a router with this cluster's secret may name a bootstrap address here; "
            "for another router, start this instance with --allow-bootstrap HOST:PORT"
        )

    def move_refusal(self, targets: Iterable[tuple[str, int]]) -> str:
        """Return why requests must not move to ``targets``, "" if they may.

        ``targets``: (host, port) of bootstrap servers.
        """
        for host, port in targets:
            is_known = (host.lower(), port) in self._targets or means_this_host(host)
            if not (is_known or self._follows_all):
                place = f"{shown(host)}:{port}"
                return (
                    f"{place} is neither on this host nor named in this instance's options; start it with "
                    f"--allow-bootstrap {place}"
                )
        return ""

    def trusted(self, fields: RequestFields) -> bool:
        """Return whether the bootstrap addresses of ``fields`` are signed by a router or in ``--allow-bootstrap``.

        ``refusal`` must have allowed them. It also allows loopback addresses without a cluster secret, and all
        addresses with ``--insecure-cluster``, which count as neither.
        """
        return self._has_secret or self._addresses(fields) <= self._allowed

    def _addresses(self, fields: RequestFields) -> set[tuple[str, int]]:
        hosts, ports = fields.bootstrap_host, fields.bootstrap_port
        size = max(len(value) if isinstance(value, list) else 1 for value in (hosts, ports))
        all_hosts = hosts if isinstance(hosts, list) else [hosts] * size
        all_ports = ports if isinstance(ports, list) else [ports] * size
        pairs = zip(all_hosts, all_ports, strict=False)  # lists of unequal length are refused elsewhere
        return {(str(host).lower(), port or self.default_port) for host, port in pairs}
