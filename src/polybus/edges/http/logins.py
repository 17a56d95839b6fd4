"""Who sends a request: the administrator, an account, or the default account without a login.

In this order: the administrator's socket; the administrator's token or an account's (`Bearer`); an
account's name and password (`Basic`); without such a header, the certificate of the connection, or
nothing, if `accounts.default` admits the peer's address. A valid token is accepted at once;
failures are answered with a delay (services/accounts/throttle.py).
"""

from base64 import b64decode
from typing import NamedTuple

from starlette.requests import Request

from polybus.edges.http.state import HttpState
from polybus.errors import UsageError
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.accounts import FAILED, NEEDED

CHALLENGE = 'Basic realm="polybus", Bearer'
"""The value of the header WWW-Authenticate in a 401."""


class Caller(NamedTuple):
    """The information of a connection about its peer."""

    is_admin: bool
    ip: str
    certificate_name: str | None


async def access_of(state: HttpState, request: Request) -> AccountAccess:
    """The access of a request's sender. Raises UsageError `auth.needed`, `.failed`, `.busy`."""
    about = request.state
    caller = Caller(about.is_admin, about.ip, about.certificate_name)
    return await access_by(state, caller, request.headers.get("authorization"))


async def access_by(state: HttpState, caller: Caller, header: str | None) -> AccountAccess:
    """The access of a peer with this Authorization header. Raises as `access_of` does."""
    accounts, address = state.accounts, caller.ip
    if caller.is_admin:
        return accounts.admin
    if header is None:
        known = accounts.by_certificate(caller.certificate_name)
        access = known or accounts.without_login(address)
        if access is None:
            raise UsageError("auth.needed", NEEDED)
        return access
    if state.token.is_in(header):
        return accounts.admin
    scheme, _, credentials = header.strip().partition(" ")
    if scheme.lower() == "bearer":
        token = credentials.strip()
        return accounts.by_token(token) or await accounts.log_in_by_token(token, address)
    user, password = _basic(scheme, credentials)
    return await accounts.log_in(user, password, address)


def is_trusted(state: HttpState, request: Request) -> bool:
    """Whether the sender is an administrator or, without a login, the default account.

    For requests that everyone may send, but that give strangers a shorter answer.
    """
    if is_administrator(state, request):
        return True
    is_open = state.accounts.without_login(request.state.ip) is not None
    return is_open and "authorization" not in request.headers


def is_administrator(state: HttpState, request: Request) -> bool:
    """Whether the sender is an administrator, by its socket or its token."""
    return bool(request.state.is_admin) or state.token.is_in(request.headers.get("authorization"))


def _basic(scheme: str, credentials: str) -> tuple[str, str]:
    try:
        user, colon, password = b64decode(credentials, validate=True).decode().partition(":")
    except ValueError:
        colon = ""
    if scheme.lower() != "basic" or not colon:
        # Without its cause, which would show the credentials.
        raise UsageError("auth.failed", FAILED)
    return user, password
