"""The context of every edge of one bus: the bus, its accounts, and the record of errors."""

from dataclasses import dataclass

from polybus.services.accounts.accounts import Accounts
from polybus.services.bad_peers import BadPeers
from polybus.services.blobs.blobs import Blobs
from polybus.services.context import Context


@dataclass(frozen=True, slots=True)
class Edge:
    """The bus, its accounts and blobs, and the record of peers' errors."""

    context: Context
    bad_peers: BadPeers
    accounts: Accounts
    blobs: Blobs
