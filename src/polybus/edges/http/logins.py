"""Who sends a request: the administrator, an account, or the default account without a login.

In this order: the administrator's socket; the administrator's token or an account's (`Bearer`); an
account's name and password (`Basic`); without such a header, the certificate of the connection, or
nothing, if `accounts.default` lets the peer's address in. A valid token is found at once; whatever
is wrong is answered late (services/accounts/throttle.py).
"""

from base64 import b64decode

from starlette.requests import Request

from polybus.edges.http.state import HttpState
from polybus.errors import UsageError
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.accounts import FAILED, NEEDED

CHALLENGE = 'Basic realm="polybus", Bearer'
"""What a 401 offers in its header WWW-Authenticate."""


async def access_of(state: HttpState, request: Request) -> AccountAccess:
    """What the sender of a request may do. Raises UsageError `auth.needed`, `.failed`, `.busy`."""
    accounts = state.accounts
    if request.state.is_admin:
        return accounts.admin
    address: str = request.state.ip
    header = request.headers.get("authorization")
    if header is None:
        known = accounts.by_certificate(request.state.certificate_name)
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

    For what strangers may ask too, but get a shorter answer.
    """
    header = request.headers.get("authorization")
    if request.state.is_admin or state.token.is_in(header):
        return True
    return header is None and state.accounts.without_login(request.state.ip) is not None


def _basic(scheme: str, credentials: str) -> tuple[str, str]:
    try:
        user, colon, password = b64decode(credentials, validate=True).decode().partition(":")
    except ValueError:
        colon = ""
    if scheme.lower() != "basic" or not colon:
        # Without its cause, which would show what was sent.
        raise UsageError("auth.failed", FAILED)
    return user, password
