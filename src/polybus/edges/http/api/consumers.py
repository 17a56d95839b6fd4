"""/v1/consumers: the programs that read topics, with their position and lag.

A group belongs to the account that reports it. The bus knows it by its full name, `shop/etl`.
"""

import asyncio
from collections.abc import Iterable

import msgspec

from polybus.bus.bus import unknown_topic
from polybus.edges.http.calls import Call, denied
from polybus.services.accounts.access import AccountAccess
from polybus.services.ages import times_at
from polybus.services.consumers import ConsumerOwner, ConsumerView, Report, unknown_consumer


class ConsumerList(msgspec.Struct):
    consumers: list[ConsumerView]


async def list_consumers(call: Call) -> ConsumerList:
    """The account's consumers, with their lag."""
    views = call.state.consumers.views()
    shown = [_shown(view, call.access) for view in views]
    found = [view for view in shown if view is not None]
    wanted = [
        (call.access.full(one.topic), one.offset)
        for view in found
        for one in view.topics
        if one.lag
    ]
    now_us = call.state.context.clock_us()
    times = await asyncio.to_thread(times_at, call.state.bus.log, wanted)
    ages = {at: max(0, now_us - time_us) / 1e6 for at, time_us in times.items()}
    return ConsumerList([_aged(view, call.access, ages) for view in found])


def _aged(
    view: ConsumerView, access: AccountAccess, ages: dict[tuple[str, int], float]
) -> ConsumerView:
    """A consumer with its lag in seconds."""
    topics = []
    for one in view.topics:
        age_s = ages.get((access.full(one.topic), one.offset)) if one.lag else 0.0
        lag_s = None if age_s is None else round(age_s, 3)
        topics.append(msgspec.structs.replace(one, lag_s=lag_s))
    known = [one.lag_s for one in topics if one.lag_s is not None]
    return msgspec.structs.replace(view, topics=topics, lag_s=max(known, default=None))


def _shown(view: ConsumerView, access: AccountAccess) -> ConsumerView | None:
    """A consumer by the account's names, without topics that it may not read any more."""
    group = access.mine(view.group)
    if group is None:
        return None
    lags = [
        msgspec.structs.replace(one, topic=access.shown(one.topic))
        for one in view.topics
        if "subscribe" in access.rights(one.topic)
    ]
    return msgspec.structs.replace(
        view,
        group=group,
        topics=lags,
        lag=sum(one.lag or 0 for one in lags),
        data_loss=any(one.data_loss for one in lags),
    )


async def report(call: Call, body: Report) -> None:
    """Report a consumer's position; fields that are left out keep their values."""
    group = call.access.own(call.path["group"])
    if call.access.mine(group) is None:
        raise denied("the group belongs to another account")
    if body.positions is not None:
        positions = {}
        for shown, at in body.positions.items():
            topic = call.access.full(shown.lower())
            if "subscribe" not in call.access.rights(topic):
                raise unknown_topic(shown.lower())
            positions[topic] = at
        # These replace all positions of the group, also those reported by others.
        known = call.state.consumers.positions(group)
        if not all("subscribe" in call.access.rights(topic) for topic in known):
            call.check_manages(known, "consumers")
        body = msgspec.structs.replace(body, positions=positions)
    call.state.consumers.report(group, body, _owner(call, group, body.positions or ()))
    await call.state.consumers.save()


def _owner(call: Call, group: str, topics: Iterable[str]) -> ConsumerOwner:
    access = call.access
    if call.is_admin:
        return ConsumerOwner(account=access.owner_of(group))
    limits = call.state.accounts.configs.limits.get(access.account)
    return ConsumerOwner(
        account=access.account,
        consumers_max=None if limits is None else limits.consumers_max,
        guest_in=frozenset(topic for topic in topics if not access.may_hold(topic)),
    )


async def forget(call: Call) -> None:
    """Forget a consumer; retention no longer waits for it."""
    name = call.path["group"]
    group = call.access.own(name)
    if call.access.mine(group) is None:
        raise unknown_consumer(name)
    call.check_manages(call.state.consumers.positions(group), "consumers")
    call.state.consumers.forget(group)
    await call.state.consumers.save()
    call.changes(group)
