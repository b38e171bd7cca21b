"""What can go wrong in a hand-over. The type says whether trying again can help; the message says what to do."""

from __future__ import annotations


class TransferError(Exception):
    """Base of every error of this folder."""

    retriable = False
    """Whether the same operation can succeed later without any change."""


class UnknownBackend(TransferError):
    """No transfer backend has this name."""


class BackendUnavailable(TransferError):
    """What the transfer backend needs is not installed here."""


class BadMetadata(TransferError):
    """The peer's backend metadata is not of this backend, or not readable."""


class BadPages(TransferError):
    """A write names pages or layers that a pool does not have, or not as many here as there."""


class PeerUnreachable(TransferError):
    """The peer's data address does not answer."""

    retriable = True


class NotConnected(TransferError):
    """There is no link to this peer. It has to be connected (again)."""

    retriable = True


class LinkLost(TransferError):
    """The link to the peer broke; what was on its way may or may not have arrived."""

    retriable = True


class ProtocolBroken(LinkLost):
    """The peer said or did what no honest one does; its connection was ended for it."""


class NotRegistered(TransferError):
    """The bootstrap server has no registration (yet), or does not answer."""

    retriable = True


class RegistrationConflict(TransferError):
    """A newer instance has taken the registration over, or this one has withdrawn from it."""


class InvalidRegistration(TransferError):
    """The bootstrap server's answer, or a registration given to it, is not a registration."""
