"""Every error streamsync raises. A message says what, where (rank, peer, tensor), what to do."""

from __future__ import annotations


class StreamsyncError(Exception):
    """Base of all errors of this package.

    `where` holds the coordinates of the failure (`rank`, `peer`, `tensor`, `bucket`, `stage`,
    `version`); they end the message, and programs may read them. `peer_text` is what the other
    side said of it, in its own words.
    """

    def __init__(self, message: str, *, peer_text: str = "", **where: object) -> None:
        self.message = message
        self.peer_text = peer_text
        self.where = {name: value for name, value in where.items() if value is not None}
        super().__init__(message)

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text += " [" + ", ".join(f"{name}={value}" for name, value in self.where.items()) + "]"
        if self.peer_text:
            text += f" (peer says: {self.peer_text})"
        return text

    def at(self, **where: object) -> StreamsyncError:
        """Adds coordinates that this error does not have yet; returns the error itself."""
        for name, value in where.items():
            if value is not None:
                self.where.setdefault(name, value)
        return self


def root_error(error: BaseException) -> BaseException:
    """The first error that is not an exception group, of a group of groups; else `error`."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class ConfigError(StreamsyncError):
    """A setting, option or environment is wrong; nothing was started."""


class MissingExtraError(ConfigError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': pip install 'streamsync[{extra}]'")
        self.extra = extra


class LayoutError(StreamsyncError):
    """A tensor's place can't be expressed as boxes and strided views."""


class PlanError(StreamsyncError):
    """Sources and sink do not fit: refused before a byte moved."""


class ControlError(StreamsyncError):
    """The control plane failed: hub unreachable, secret refused, message malformed."""


class TransportError(StreamsyncError):
    """The data plane failed."""


class PeerLost(TransportError):
    """A peer closed, died or was disconnected."""


class TransferTimeout(TransportError):
    """A deadline passed while waiting for a peer."""


class IntegrityError(StreamsyncError):
    """Bytes arrived that are not the bytes that were sent."""


class EngineError(StreamsyncError):
    """The engine's loader or a gate failed."""


class QuarantinedError(EngineError):
    """The replica may hold a torn model: it makes no token until a full transfer heals it."""


class PoisonedStepError(EngineError):
    """This forward met a version that can't finish: drop its outputs, recompute after healing."""


class VersionError(StreamsyncError):
    """A version was used twice, went backwards, or failed at a replica."""
