"""The one place where boto3's errors become kvwire's.

Messages carry the error's code and status, never what the server or the library wrote: that may quote a request, with
its signature. The causes, which say it, are cut off.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from botocore import exceptions as boto
from urllib3.exceptions import HTTPError

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store.http_clients import PROXY_ADVICE, TRUST_ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
_MISSING, _REPLACED, _TOO_MANY = 404, 412, 429
_NOT_CREATED = (409, 412, 501)
_OTHERS = (409, 412)
_REFUSED = (401, 403)
_MOVED = (301, 302, 307, 308)
_PROXYS = 407
_SERVERS_FAULT = 500
_CHECK = "check the access key, the secret and what they may do"
_PERMISSIONS = {
    "HeadBucket": "s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}
_WRITING = "s3:PutObject, for conditional writes s3:GetObject too,"
_REGION = "add ?region=NAME to the address, or set AWS_DEFAULT_REGION"
_ABOUT_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    boto.NoAuthTokenError,
    boto.SSOError,
    boto.TokenRetrievalError,
)
_ABOUT_ARGUMENTS = (
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.InvalidConfigError,
    boto.InvalidRegionError,
    boto.NoRegionError,
    boto.ParamValidationError,
    boto.ProfileNotFound,
)


class NoSuchUploadError(StorageError):
    """A multipart upload that is over: completed, perhaps by a request whose answer was lost, or aborted."""


_BY_CODE: dict[str, tuple[type[KvwireError], str]] = {
    "NoSuchKey": (NotFoundError, "it is not there"),
    "NoSuchBucket": (
        NotFoundError,
        "there is no such bucket: create it first, for example with 'aws s3api create-bucket --bucket NAME'",
    ),
    "NoSuchUpload": (NoSuchUploadError, "the upload was ended from elsewhere: write the object again"),
    "ExpiredToken": (AuthError, "the session token has expired: get fresh credentials"),
    "RequestTimeTooSkewed": (AuthError, "this machine's clock differs from the server's: set it right"),
    "AuthorizationHeaderMalformed": (AuthError, f"the request was signed for another region: {_REGION}"),
    "QuotaExceeded": (StorageError, "the quota is used up: free space or raise it"),
    "XMinioStorageFull": (StorageError, "the server's disks are full"),
    "InvalidObjectState": (StorageError, "the object is archived: restore it first"),
    "KeyTooLongError": (ArgumentError, "the key is too long for this server: use a shorter prefix"),
    "InvalidBucketName": (ArgumentError, "the server takes no bucket of that name"),
}


class DeniedError(AuthError):
    """The server knows the credentials, and they may not do this, or, without s3:ListBucket, nothing is there."""


@contextmanager
def s3_errors(what: str) -> Iterator[None]:
    """Translate everything that boto3 raises inside."""
    try:
        yield
    except KvwireError:
        raise
    except boto.ClientError as error:
        raise error_of(code_of(error), status_of(error), what, error.operation_name) from None
    except RecursionError as error:  # boto3 follows redirections to other regions without counting them
        raise error_of(type(error).__name__, _MOVED[0], what) from None
    except (boto.BotoCoreError, HTTPError, OSError) as error:
        raise _unanswered(error, what) from None
    except (KeyError, TypeError, ValueError) as error:  # an answer that lacks something
        msg = f"{what}: the answer makes no sense ({type(error).__name__}): check that the server speaks S3"
        raise StorageError(msg) from None


def status_of(error: boto.ClientError) -> int:
    """The HTTP status of a refusal."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status if isinstance(status, int) else 0


def code_of(error: boto.ClientError) -> str:
    """S3's code of a refusal."""
    return plain_code(error.response.get("Error", {}).get("Code"))


def is_taken(error: boto.ClientError) -> bool:
    """Whether a conditional write was not done."""
    return status_of(error) in _NOT_CREATED or code_of(error) in ("NotImplemented", "PreconditionFailed")


def is_conflict(error: boto.ClientError) -> bool:
    """Whether a conditional write met another version than it was for."""
    return status_of(error) in _OTHERS or code_of(error) in ("NoSuchKey", "PreconditionFailed")


def is_repeated(error: boto.ClientError) -> bool:
    """Whether boto3 had sent the request before: the server may have done it then, and refuse its repetition."""
    return bool(error.response.get("ResponseMetadata", {}).get("RetryAttempts"))


def plain_code(code: object) -> str:
    """An error code that is safe to show."""
    return code if isinstance(code, str) and _CODE.fullmatch(code) else "unknown"


def error_of(code: str, status: int, what: str, operation: str = "") -> KvwireError:
    """The kvwire error for an S3 error code and an HTTP status."""
    if code in _BY_CODE:
        kind, advice = _BY_CODE[code]
    elif code == "AccessDenied":
        kind, advice = DeniedError, f"these credentials may not do that: allow {_PERMISSIONS.get(operation, _WRITING)}"
        advice += " in their policy (and in that of the KMS key, where one encrypts the bucket)"
    elif status in _REFUSED:
        kind, advice = AuthError, f"the server refused the credentials: {_CHECK}"
    elif status == _MISSING:
        kind, advice = NotFoundError, "it is not there; check that the bucket is"
    elif status == _REPLACED:
        kind, advice = StorageError, "it was replaced meanwhile: open it again"
    elif status in _MOVED:
        kind, advice = ArgumentError, f"the bucket lies in another region or behind another endpoint: {_REGION}"
        advice += ", or name its endpoint (?endpoint=URL, AWS_ENDPOINT_URL)"
    elif status == _PROXYS:
        kind, advice = StorageError, PROXY_ADVICE
    elif status == _TOO_MANY or status >= _SERVERS_FAULT or code in ("SlowDown", "RequestTimeout"):
        kind, advice = StorageError, "the server is busy or failed: try again later"
    else:
        kind, advice = StorageError, "the server refused the request: check that it speaks S3"
    return kind(f"{what}: {advice} ({code}, status {status or 'unknown'})")


def _unanswered(error: Exception, what: str) -> KvwireError:
    name = type(error).__name__
    if isinstance(error, _ABOUT_CREDENTIALS):
        return AuthError(f"{what}: no usable credentials ({name}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, _ABOUT_ARGUMENTS):
        return ArgumentError(f"{what}: boto3 refused the address or its settings ({name}): check region and profile")
    advice = "try again, or check the endpoint and the network"
    if isinstance(error, boto.ProxyConnectionError):
        advice = PROXY_ADVICE
    elif isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        advice = TRUST_ADVICE
    return StorageError(f"{what}: the connection failed ({name}): {advice}")
