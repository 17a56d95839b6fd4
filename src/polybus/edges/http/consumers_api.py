"""/v1/consumers: the programs that read topics, with their position and lag.

A group belongs to the account that reports it. The bus knows it by its full name, `shop/etl`.
"""

import msgspec

from polybus.bus.bus import unknown_topic
from polybus.edges.http.calls import Call, denied
from polybus.services.accounts.access import AccountAccess
from polybus.services.consumers import ConsumerView, Report, unknown_consumer


class ConsumerList(msgspec.Struct):
    consumers: list[ConsumerView]


async def list_consumers(call: Call) -> ConsumerList:
    """The account's consumers, with their lag."""
    views = call.state.consumers.views()
    shown = [_shown(view, call.access) for view in views]
    return ConsumerList([view for view in shown if view is not None])


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
        body = msgspec.structs.replace(body, positions=positions)
    call.state.consumers.report(group, body)
    await call.state.consumers.save()


async def forget(call: Call) -> None:
    """Forget a consumer; retention no longer waits for it."""
    name = call.path["group"]
    group = call.access.own(name)
    if call.access.mine(group) is None:
        raise unknown_consumer(name)
    call.state.consumers.forget(group)
    await call.state.consumers.save()
