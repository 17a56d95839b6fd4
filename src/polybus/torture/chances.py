"""Independent generators of random numbers.

A round is planned by its seed. So the load, each fault and each parser has a generator of its own:
how often one of them draws, which depends on the machine, changes nothing for the others.
"""

import random
from collections.abc import Iterable


def split(chance: random.Random) -> random.Random:
    """A generator of its own, for one draw from `chance`."""
    return random.Random(chance.getrandbits(64))


def ranked(options: Iterable[str], salt: int) -> list[str]:
    """The options in an order that `salt` decides, each first with the same chance.

    The presence of an option does not change the order of the others.
    """
    return sorted(options, key=lambda option: random.Random(f"{salt} {option}").random())
