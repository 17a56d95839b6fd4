"""What every edge of one bus is given: the bus behind it, its accounts, and a record of errors."""

from dataclasses import dataclass

from polybus.services.accounts.accounts import Accounts
from polybus.services.bad_peers import BadPeers
from polybus.services.blobs.blobs import Blobs
from polybus.services.context import Context


@dataclass(frozen=True, slots=True)
class Edge:
    """The bus behind the edges, its accounts and blobs, and the record of peers' errors."""

    context: Context
    bad_peers: BadPeers
    accounts: Accounts
    blobs: Blobs
