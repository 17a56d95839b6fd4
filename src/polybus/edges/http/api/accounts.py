"""/v1/accounts: administrators create accounts, share their topics and hand out tokens.

/v1/signup: strangers create accounts, if `accounts.signup` is set. No answer has the hash of a
password or the digest of a token.
"""

from typing import Annotated

import msgspec

from polybus import names
from polybus.edges.http.calls import Call, denied
from polybus.errors import UsageError
from polybus.services.accounts.records import Account, Grant, Right, Token, account_name

SECONDS_MAX = 1e11

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
Password = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Rights = Annotated[list[Right], msgspec.Meta(min_length=1)]
Time = Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX, description="Seconds since 1970.")]


class NewAccount(msgspec.Struct, forbid_unknown_fields=True):
    """An account; without a password it can log in by its tokens only."""

    name: Name
    password: Password | None = None


class SignUp(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    password: Password


class SignedUp(msgspec.Struct):
    name: str


class NewPassword(msgspec.Struct, forbid_unknown_fields=True):
    """Null: log in by tokens only."""

    password: Password | None


class NewGrant(msgspec.Struct, forbid_unknown_fields=True):
    """The account `to` gets the rights to the owner's topics that the pattern `topics` matches."""

    to: Name
    topics: Pattern
    rights: Rights


class OldGrant(msgspec.Struct, forbid_unknown_fields=True):
    to: Name
    topics: Pattern


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    """Patterns of topics, as the account calls them, and rights; empty are all of the account."""

    topics: Annotated[list[Pattern], msgspec.Meta(max_length=100)] = []
    rights: list[Right] = []
    expires: Time | None = None


class TokenCreated(msgspec.Struct):
    """The token is shown only here: treat it as a password."""

    token: str
    id: str


class TokenView(msgspec.Struct):
    """A token without its secret; empty topics and rights are all of the account."""

    id: str
    created: str
    topics: tuple[str, ...]
    rights: tuple[Right, ...]
    expires: float | None


class AccountView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An account: whether it has a password, its tokens, and the topics it shares.

    `damaged` says why no one can log in.
    """

    name: str
    created: str
    password: bool
    tokens: list[TokenView]
    grants: list[Grant]
    damaged: str = ""


class AccountList(msgspec.Struct):
    accounts: list[AccountView]


def _view(call: Call, account: Account) -> AccountView:
    return AccountView(
        name=account.name,
        created=account.created,
        password=account.password is not None,
        tokens=[_token(token) for token in account.tokens],
        grants=list(account.grants),
        damaged=call.state.accounts.store.damaged.get(account.name, ""),
    )


def _token(token: Token) -> TokenView:
    return TokenView(token.id, token.created, token.topics, token.rights, token.expires)


def _name(call: Call) -> str:
    return call.path["account"].lower()


async def list_accounts(call: Call) -> AccountList:
    """All accounts."""
    accounts = call.state.accounts.store.accounts
    return AccountList([_view(call, one) for _, one in sorted(accounts.items())])


async def create(call: Call, body: NewAccount) -> AccountView:
    """Create an account."""
    account = await call.state.accounts.create(body.name, body.password)
    call.changes(account.name)
    return _view(call, account)


async def sign_up(call: Call) -> SignedUp:
    """Create an account for the caller."""
    state = call.state
    if not state.config.accounts.signup:
        # Answer as for an unknown path, whatever the body is.
        raise UsageError("http.not-found", "Not Found")
    body = await call.json(SignUp)
    account_name(body.name)
    state.signups.count(call.request.state.ip)
    try:
        account = await state.accounts.create(body.name, body.password)
    except UsageError as error:
        if error.code not in ("account.exists", "account.taken"):
            raise
        # The two errors have different texts, and one names a topic of the default account.
        raise UsageError("account.exists", "the name is taken; choose another") from None
    call.changes(account.name)
    return SignedUp(account.name)


async def show(call: Call) -> AccountView:
    """One account."""
    return _view(call, call.state.accounts.store.get(_name(call)))


async def delete(call: Call) -> None:
    """Delete an account with its topics, messages and sessions."""
    name = _name(call)
    await call.state.accounts.remove(name)
    await call.state.services.forget_account(name)
    call.changes(name)


async def set_password(call: Call, body: NewPassword) -> None:
    """Replace an account's password; connections that logged in by the old one are closed."""
    await call.state.accounts.set_password(_name(call), body.password)
    call.changes(_name(call))


async def grant(call: Call, body: NewGrant) -> None:
    """Share topics with another account; a grant of the same pattern is replaced."""
    await call.state.accounts.apart(
        call.state.accounts.grant, _name(call), body.to.lower(), body.topics, body.rights
    )
    detail = {"to": body.to.lower(), "topics": body.topics, "rights": list(body.rights)}
    call.changes(_name(call), detail)


async def revoke(call: Call, body: OldGrant) -> None:
    """Revoke a grant; sessions and connections leave the topics."""
    await call.state.accounts.apart(
        call.state.accounts.revoke, _name(call), body.to.lower(), body.topics
    )
    call.changes(_name(call), {"to": body.to.lower(), "topics": body.topics})


async def make_token(call: Call, body: NewToken) -> TokenCreated:
    """Make a token; the answer is the only place where it is shown."""
    token = await call.state.accounts.apart(
        call.state.accounts.store.make_token,
        _name(call),
        topics=body.topics,
        rights=body.rights,
        expires=body.expires,
    )
    return _created(call, _name(call), token)


def _created(call: Call, account: str, token: str) -> TokenCreated:
    name = token.split("_")[1]
    call.changes(account, {"token": name})
    return TokenCreated(token, name)


async def make_own_token(call: Call, body: NewToken) -> TokenCreated:
    """Make a token for the account that the caller logged in to by its password."""
    access = call.access
    if access.token is not None or call.is_admin or access.account == names.ACCOUNT:
        # A token could give itself more rights, or more time, and a user of the default account
        # without a login could then use it from anywhere.
        raise denied("only accounts that logged in by a password may make a token")
    token = await call.state.accounts.apart(
        call.state.accounts.store.make_token,
        access.account,
        topics=body.topics,
        rights=body.rights,
        expires=body.expires,
    )
    return _created(call, access.account, token)


async def revoke_own_token(call: Call) -> None:
    """Revoke a token of the account; a token may revoke itself only."""
    token = call.access.token
    if token is not None and token.id != call.path["id"]:
        raise denied("a token may revoke itself only")
    await call.state.accounts.apart(
        call.state.accounts.revoke_token, call.access.account, call.path["id"]
    )
    call.changes(call.access.account, {"token": call.path["id"]})


async def revoke_token(call: Call) -> None:
    """Revoke a token; connections that logged in by it are closed."""
    await call.state.accounts.apart(call.state.accounts.revoke_token, _name(call), call.path["id"])
    call.changes(_name(call), {"token": call.path["id"]})
