"""What the console shows of the bus as a whole: /v1/info, figures and their history, `$audit`."""

from __future__ import annotations

from typing import Any

import pytest
from accounts_http_kit import accounts_bus
from http_kit import Http, http_bus

from polybus.edges.http.state import HttpState
from polybus.errors import StorageError
from polybus.services.figures.rings import SeriesRing


async def audited(http: Http) -> list[dict[str, Any]]:
    answer = await http.client.get("/v1/topics/$audit/messages")
    return [message["value"] for message in answer.json()["messages"]]


async def test_info_says_what_the_bus_is_and_what_the_caller_may_do() -> None:
    async with accounts_bus() as bus:
        shop, admin = await bus.of("shop"), await bus.admin()
        for http, account, is_admin in ((shop, "shop", False), (admin, "$admin", True)):
            info = (await http.client.get("/v1/info")).json()

            assert (info["account"], info["is-admin"]) == (account, is_admin)
            assert info["sees-bus"] is is_admin
            assert info["rights"] == ["administer", "publish", "subscribe"]
            assert info["healthy"] and info["uptime-s"] >= 0
            assert set(info["features"]) == {"java", "metrics", "pipeline", "signup", "sql"}


async def test_a_bus_that_has_just_started_has_figures() -> None:
    async with http_bus("news") as http:
        sample = (await http.client.get("/v1/figures")).json()

        assert sample["series"]["sessions"] == 0
        assert sample["series"]["disk-free-bytes"] > 0


async def test_rates_totals_and_times_of_a_topic_are_shown() -> None:
    async with http_bus("news", "idle") as http:
        key = await http.open_session("news")
        await http.publish("news", b"hello", b"world!")
        await http.packs(key)
        http.node.http.figures.sample()
        news = (await http.client.get("/v1/topics/news")).json()
        idle = (await http.client.get("/v1/topics/idle")).json()
        listed = (await http.client.get("/v1/topics")).json()["topics"]
        sample = (await http.client.get("/v1/figures")).json()

        assert (news["bytes-in"], news["messages-in"], news["messages-out"]) == (11, 2, 2)
        assert listed[1]["stored-bytes"] == news["stored-bytes"] >= 11 > idle["stored-bytes"]
        assert news["in-per-s"] > 0 and news["bytes-in-per-s"] > news["in-per-s"]
        assert news["first-time"] <= news["last-time"] and news["first-time"].endswith("Z")
        assert (idle["in-per-s"], idle["first-time"], idle["last-time"]) == (0.0, None, None)
        assert listed[1]["in-per-s"] > 0 and listed[1]["last-time"]
        assert sample["topics"]["news"][2] == 2
        assert sample["series"]["in.messages.http"] == sample["series"]["in.messages"]
        assert sample["series"]["sessions"] == 1.0


async def test_the_last_hour_is_answered_in_steps_and_goes_to_the_log_every_ten_seconds() -> None:
    async with http_bus("news") as http:
        figures = http.node.http.figures
        await http.publish("news", b"hello")
        figures.sample()
        figures._flushed_s -= 10
        figures.sample()
        past = (await http.client.get("/v1/metrics/history?range-s=60&step-s=60")).json()
        stored = (await http.client.get("/v1/topics/$metrics/messages")).json()["messages"]

        assert len(past["times"]) == len(past["series"]["in.messages"]) >= 1
        assert past["series"]["in.messages.http"][-1] > 0
        assert past["topics"]["news"][-1] > 0
        assert stored[-1]["value"]["series"]["in.messages"] > 0
        assert (await http.client.get("/v1/metrics/history?step-s=0")).status_code == 400


async def test_the_lag_of_groups_is_kept_in_messages_and_in_seconds_at_times_of_its_own() -> None:
    async with http_bus("news") as http:
        figures = http.node.http.figures
        await http.publish("news", b"hello")
        at = {"epoch": http.node.bus.log.bounds("news").epoch, "offset": 0}
        report = {"positions": {"news": at}}
        assert (await http.client.put("/v1/consumers/etl", json=report)).status_code == 204
        for second in range(3):
            figures._flushed_s -= 10 * (second != 1)
            figures.sample()
            await http.until(lambda: "etl" in figures._ages)
        sample = (await http.client.get("/v1/figures")).json()
        past = (await http.client.get("/v1/metrics/history?range-s=60&step-s=1")).json()
        stored = (await http.client.get("/v1/topics/$metrics/messages")).json()["messages"]

        assert sample["groups"] == {"etl": 1} and sample["group-lag-s"]["etl"] >= 0
        assert len(past["slow-times"]) == len(past["groups"]["etl"]) >= 1
        assert len(past["slow-times"]) == len(past["group-lag-s"]["etl"])
        assert stored[-1]["value"]["group-lag-s"]["etl"] >= 0


async def test_the_list_of_topics_has_what_each_keeps() -> None:
    async with http_bus("news", "own", retention={"age-s": 3600}) as http:
        await http.client.patch("/v1/topics/own", json={"retention-bytes": 1000})
        listed = (await http.client.get("/v1/topics")).json()["topics"]

        assert [one["retention"] for one in listed] == [
            {"retention-age-s": 3600.0, "retention-bytes": bytes_max}
            for bytes_max in (listed[0]["retention"]["retention-bytes"], 1000)
        ]


async def test_what_is_wrong_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    error = StorageError("log.write-failed", "cannot write the journal: no space left")
    monkeypatch.setattr(HttpState, "storage_error", error)
    async with accounts_bus() as bus:
        shop, admin = await bus.of("shop"), await bus.admin()
        stopped = {"stopped": {"news": "damaged"}}
        await admin.client.put("/v1/consumers/etl", json=stopped)
        stranger = (await shop.client.get("/v1/info")).json()
        known = (await admin.client.get("/v1/info")).json()
        alerts = (await admin.client.get("/v1/figures")).json()["alerts"]

        assert (stranger["problem"], stranger["problem-text"]) == (error.code, "")
        assert (known["problem"], known["problem-text"]) == (error.code, error.text)
        assert {"code": error.code, "text": error.text} in alerts
        assert alerts[-1] == {
            "code": "consumer-stopped",
            "text": "etl does not read news: damaged",
        }


async def test_others_than_the_default_account_see_figures_of_their_own_topics_only() -> None:
    async with accounts_bus() as bus:
        shop, admin = await bus.of("shop"), await bus.admin()
        await shop.publish("news", b"1")
        await admin.publish("news", b"1")
        bus.node.http.figures.sample()
        own = (await shop.client.get("/v1/figures")).json()
        every = (await admin.client.get("/v1/figures")).json()

        assert (list(own["topics"]), own["series"], own["alerts"]) == (["news"], {}, [])
        assert {"news", "shop/news"} <= set(every["topics"])
        for path in ("/v1/metrics/history", "/v1/settings"):
            assert (await shop.client.get(path)).json()["code"] == "auth.denied"
            assert (await admin.client.get(path)).status_code == 200


async def test_retention_is_changed_kept_over_a_restart_and_recorded(tmp_path: Any) -> None:
    async with http_bus("news", data=str(tmp_path)) as http:
        changed = await http.client.patch("/v1/topics/news", json={"retention-age-s": 60})
        again = await http.client.patch("/v1/topics/news", json={"retention-bytes": 1000})
        wrong = await http.client.patch("/v1/topics/news", json={"retention-bytes": -1})

        assert changed.json()["settings"] == {"retention-age-s": 60.0, "retention-bytes": None}
        assert again.json()["retention"] == {"retention-age-s": 60.0, "retention-bytes": 1000}
        assert wrong.status_code == 400
        assert (await http.client.patch("/v1/topics/nix", json={})).status_code == 404
        assert (await http.client.patch("/v1/topics/$stats", json={})).status_code == 403
    async with http_bus(data=str(tmp_path)) as http:
        shown = (await http.client.get("/v1/topics/news")).json()
        default = await http.client.patch("/v1/topics/news", json={"retention-age-s": None})

        assert shown["settings"] == {"retention-age-s": 60.0, "retention-bytes": 1000}
        assert default.json()["settings"]["retention-age-s"] is None
        actions = [(one["action"], one["target"]) for one in await audited(http)]
        assert actions == [("topic-change", "news")] * 3


async def test_every_administrative_change_is_recorded_with_who_did_it() -> None:
    async with accounts_bus() as bus:
        shop, admin = await bus.of("shop"), await bus.admin()
        await shop.client.post("/v1/topics", json={"name": "orders"})
        await shop.client.delete("/v1/topics/orders")
        await shop.client.post("/v1/tokens", json={})
        await admin.client.post("/v1/accounts", json={"name": "new", "password": "a secret word"})
        grant = {"to": "new", "topics": "news", "rights": ["subscribe"]}
        await admin.client.post("/v1/accounts/shop/grants", json=grant)
        await admin.client.delete("/v1/accounts/new")
        refused = await shop.client.post("/v1/topics", json={"name": "$no"})
        found = await audited(admin)

        assert refused.status_code == 403
        assert [(one["account"], one["action"], one["target"]) for one in found] == [
            ("shop", "topic-create", "shop/orders"),
            ("shop", "topic-delete", "shop/orders"),
            ("shop", "account-token", "shop"),
            ("$admin", "account-create", "new"),
            ("$admin", "account-grant", "shop"),
            ("$admin", "account-delete", "new"),
        ]
        assert found[4]["detail"] == grant
        assert all(one["peer"].startswith("127.0.0.1:") for one in found)
        assert "secret" not in str(found)


def test_a_ring_keeps_its_last_points_and_its_largest_series() -> None:
    ring = SeriesRing(3, 2)
    for second in range(5):
        ring.add(float(second), {"a": second, "b": 10 * second})
    ring.add(5.0, {"a": 5, "c": 7})

    times, series = ring.means(0, 1)
    assert times == [3.0, 4.0, 5.0]
    assert series["a"] == [3.0, 4.0, 5.0]
    assert set(series) == {"a", "c"} and series["c"][2] == 7.0
    assert ring.means(0, 10)[1]["a"] == [4.0]
