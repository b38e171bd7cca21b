"""Whether an instance goes where a request's bootstrap fields, or an order to move requests, say.

For bootstrap fields:

| address | cluster secret | signed by a router, or on --allow-bootstrap | |
|---|---|---|---|
| loopback | no | – | followed |
| other | no | no | refused |
| any | either | on --allow-bootstrap | followed |
| any | yes | signed | followed |
| any | yes | no | refused |

``--insecure-cluster`` without a secret follows any. Orders (``POST /migrate``, ``/drain``) are not signed: they may
name loopback addresses, and those of ``--allow-bootstrap`` and ``--drain-to``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ....messages.decode import shown
from ....messages.error_codes import OVERLOADED
from ....runtime.cluster_secret import BootstrapSignature, ClusterSecret, TooManySignatures, addresses
from ....runtime.web.ports import means_this_host
from ...options import ServerOptions
from ..bodies.request_fields import RequestFields
from ..errors import ApiError


class BootstrapGate:
    """Decides which bootstrap addresses and move targets one instance follows."""

    def __init__(self, options: ServerOptions) -> None:
        secret = ClusterSecret.read(options.cluster_secret_file)
        self._signature = BootstrapSignature(secret.for_routers()) if secret is not None else None
        self._follows_all = options.insecure_cluster and secret is None
        self._allowed = addresses("--allow-bootstrap", options.allow_bootstrap)
        self._targets = self._allowed | addresses("--drain-to", options.drain_to)
        self.default_port = options.default_bootstrap_port

    def refusal(self, fields: RequestFields) -> str:
        """Return why the bootstrap addresses of ``fields`` must not be followed, "" if they may.

        A valid signature counts as used afterwards, so a second call with it refuses. Raises ``ApiError`` 503 if no
        more signatures can be remembered.
        """
        addresses = self._addresses(fields)
        if self._follows_all or addresses <= self._allowed:
            return ""
        if self._signature is None:
            if all(means_this_host(host) for host, _ in addresses - self._allowed):
                return ""
            return (
                "without a cluster secret only loopback addresses are followed; start router and instances with "
                "--cluster-secret-file, or this instance with --allow-bootstrap HOST:PORT"
            )
        if fields.bootstrap_signature is None:
            return (
                "only a router with this cluster's secret may name a bootstrap address here; "
                "for another router, start this instance with --allow-bootstrap HOST:PORT"
            )
        signed = fields.bootstrap_host, fields.bootstrap_port, fields.bootstrap_room
        try:
            return self._signature.problem(fields.bootstrap_signature, *signed, time.time()) or ""
        except TooManySignatures as e:
            raise ApiError(503, str(e), code=OVERLOADED) from None

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
        return self._signature is not None or self._addresses(fields) <= self._allowed

    def _addresses(self, fields: RequestFields) -> set[tuple[str, int]]:
        hosts, ports = fields.bootstrap_host, fields.bootstrap_port
        size = max(len(value) if isinstance(value, list) else 1 for value in (hosts, ports))
        all_hosts = hosts if isinstance(hosts, list) else [hosts] * size
        all_ports = ports if isinstance(ports, list) else [ports] * size
        pairs = zip(all_hosts, all_ports, strict=False)  # lists of unequal length are refused elsewhere
        return {(str(host).lower(), port or self.default_port) for host, port in pairs}
