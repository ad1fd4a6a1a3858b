"""Errors of object stores: which of them pass, and what they are in words that hold no secrets."""

from __future__ import annotations

import errno
import os
import re

TRANSIENT_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}  # 409: another request for this key was under way

_TRANSIENT_NUMBERS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.EPIPE, errno.ETIMEDOUT, errno.EREMOTEIO,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETRESET,
}  # fmt: skip
_TRANSIENT_NAMES = re.compile("Timeout|Connection|Incomplete|Payload|Throttl|SlowDown|ServerDisconnected|HTTPClient")
_REFUSALS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET")
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s'\"]*=[^\s'\"]*")


class StorageError(OSError):
    """A request that a store has refused, or has not answered, in one line."""


class MissingObjectError(StorageError, FileNotFoundError):
    """There is no such object, or no such bucket."""


class ExistingObjectError(StorageError, FileExistsError):
    """There is an object of that name already."""


class ForbiddenRequestError(StorageError, PermissionError):
    """The store does not allow it."""


def refuse(error: BaseException, message: str) -> StorageError:
    """Return the error of a request that is not repeated, of the kind that `error` is."""
    status = find_status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return MissingObjectError(message)
    if is_taken(error):
        return ExistingObjectError(message)
    if isinstance(error, PermissionError) or status in (401, 403):
        return ForbiddenRequestError(message)
    return StorageError(message)


def is_taken(error: BaseException) -> bool:
    """Return whether a new object was refused because there is one of that name."""
    return isinstance(error, FileExistsError) or find_status(error) == 412


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later: time-outs, busy stores, lost connections."""
    status = find_status(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    if isinstance(error, _REFUSALS):
        return False
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_NUMBERS
    # Libraries of stores have classes of their own for lost connections.
    return any(_TRANSIENT_NAMES.search(kind.__name__) for kind in type(error).__mro__)


def find_status(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error, or its cause, carries."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", "code"):
            found = getattr(error, name, None)
            if isinstance(found, int) and 100 <= found < 600:
                return found
        error = error.__cause__
    return None


def explain_refusal(error: BaseException) -> str:
    """Return in one line what a store has answered, and what to do."""
    text = redact(" ".join(str(error).split())) or type(error).__name__
    status = find_status(error)
    shown = text if status is None else f"{text} (HTTP {status})"
    name = type(error).__name__
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in name:
        return f"{shown}. Check the credentials in the environment, and what they may do."
    if isinstance(error, FileNotFoundError) or status == 404:
        return f"{shown}. Check the name of the bucket and the endpoint."
    if is_taken(error):
        return f"{shown}. Another process writes there: give each run a folder of its own."
    if is_transient(error):
        return f"{shown}. Check the network and the state of the store, and start again."
    return f"{shown}."


def redact(text: str) -> str:
    """Return a text without credentials: those of a URL, signatures in its query, and keys of the environment."""
    text = _QUERY.sub("?…", _USER.sub("…@", text))
    for name in _SECRETS:
        if len(secret := os.environ.get(name, "")) >= 4:
            text = text.replace(secret, "…")
    return text
