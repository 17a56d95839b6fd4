"""Which fields of the API's answers the console looks for in vain, and whether the API has them."""

from __future__ import annotations

import json
import re
from typing import Any

from console_kit import Console

# Answers are wrapped: reading a field that an answer does not have is noted, with its path.
RECORDER = """
(() => {
  const missing = (window.missingFields = new Set());
  const known = new WeakMap();
  const channels = new Map();
  const parse = JSON.parse;
  function watched(value, path) {
    if (value === null || typeof value !== "object") return value;
    if (known.has(value)) return known.get(value);
    const proxy = new Proxy(value, {
      get(target, name) {
        const found = target[name];
        if (typeof name !== "string" || typeof found === "function") return found;
        const isOwn = Object.hasOwn(target, name);
        if (Array.isArray(target)) {
          return isOwn && name !== "length" ? watched(found, [...path, "[]"]) : found;
        }
        const isAsked = !["toJSON", "then"].includes(name);
        if (!isOwn && isAsked) missing.add(JSON.stringify([...path, name]));
        return watched(found, [...path, name]);
      },
    });
    known.set(value, proxy);
    return proxy;
  }
  const ask = window.fetch;
  window.fetch = async (url, options = {}) => {
    const answer = await ask(url, options);
    const source = `${options.method ?? "GET"} ${new URL(url, location.href).pathname}`;
    const json = answer.json.bind(answer);
    answer.json = async () => watched(await json(), [source]);
    return answer;
  };
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (text) {
    const { id, channel } = parse(text);
    if (channel) channels.set(id, channel);
    return send.call(this, text);
  };
  JSON.parse = (text, reviver) => {
    const found = parse(text, reviver);
    const channel = typeof text === "string" && text.startsWith("{") && channels.get(found.id);
    return channel && found.data ? { ...found, data: watched(found.data, [channel]) } : found;
  };
})();
"""
CHANNELS = {
    "figures": "GET /v1/figures",
    "graph": "GET /v1/graph",
    "pipeline": "GET /v1/pipelines",
    "connections": "GET /v1/connections",
    "replay": "GET /v1/replays/x",
    "tail": "GET /v1/topics/x/messages",
}


def record_fields(console: Console) -> None:
    """Note what the pages that are opened from now on look for in vain."""
    source = {"source": RECORDER}
    console.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)


def missing_fields(console: Console) -> list[list[str]]:
    """Of the page: the source of the answer, and the path to each field that it did not have."""
    return [json.loads(one) for one in console.run("return [...window.missingFields]")]


class ApiFields:
    """The fields of the answers in an OpenAPI document; `series` are names of the bus's figures."""

    def __init__(self, document: dict[str, Any], series: set[str]) -> None:
        self._document = document
        self._series = series

    def has(self, source: str, path: list[str]) -> bool:
        schemas = self._answers(CHANNELS.get(source, source))
        for depth, name in enumerate(path):
            if depth and path[depth - 1] == "series":
                return name in self._series or name.startswith(("in.", "out."))
            schemas = [found for one in schemas for found in self._fields(one, name)]
        return bool(schemas)

    def _answers(self, source: str) -> list[Any]:
        method, path = source.split(" ")
        for template, operations in self._document["paths"].items():
            pattern = re.sub(r"\\{[^}]+\\}", "[^/]+", re.escape(template))
            if re.fullmatch(pattern, path) and method.lower() in operations:
                answers = operations[method.lower()]["responses"]
                good = next(answers[status] for status in answers if status.startswith("2"))
                return [one["schema"] for one in good["content"].values()]
        raise AssertionError(f"the API has no {source}")

    def _fields(self, schema: dict[str, Any], name: str) -> list[Any]:
        """The schemas of a field, or of the members of a list."""
        if "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        if choices:
            return [found for one in choices for found in self._fields(one, name)]
        if name == "[]":
            return [one for one in [schema.get("items")] if isinstance(one, dict)]
        if name in schema.get("properties", {}):
            return [schema["properties"][name]]
        others = schema.get("additionalProperties")
        return [others] if isinstance(others, dict) else []
