"""What every edge of one bus is given."""

from dataclasses import dataclass

from polybus.edges.bad_peers import BadPeers
from polybus.services.context import Context


@dataclass(frozen=True, slots=True)
class Edge:
    """The bus behind the edges, and the record of peers' errors."""

    context: Context
    bad_peers: BadPeers
