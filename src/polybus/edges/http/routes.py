"""Every operation of the HTTP API: method, path, function, and the problems it may answer.

The functions' docstrings are the summaries in OpenAPI, and their signatures the types. `/`,
`/openapi.json` and `/msgstream` are not operations of the API: `app` routes them.
"""

from polybus.edges.http import commits_api, messages_api, metrics, sessions_api, topics_api
from polybus.edges.http.calls import OCTETS, TEXT, Operation
from polybus.edges.http.messages_api import NDJSON, NewMessage
from polybus.edges.http.sessions_api import PackBody

TOPICS = "/v1/topics"
TOPIC = "/v1/topics/{topic}"
MESSAGES = "/v1/topics/{topic}/messages"
SESSIONS = "/v1/sessions"
SESSION = "/v1/sessions/{key}"
PACKS = "/v1/sessions/{key}/packs"
BROADCAST = "/v1/broadcast"
CONSUMER = "/v1/consumers/{group}"
COMMITS = "/v1/commits"
STAGED = "/v1/staging/{producer}/{file}"
LINES = (NDJSON, "*/*")

OPERATIONS = (
    Operation("GET", TOPICS, topics_api.list_topics, fails=[400]),
    Operation("POST", TOPICS, topics_api.create, status=201, fails=[400, 403, 409]),
    Operation("GET", TOPIC, topics_api.show, fails=[404]),
    Operation("DELETE", TOPIC, topics_api.delete, status=204, fails=[403, 404]),
    Operation(
        "POST", MESSAGES, messages_api.publish, fails=[400, 403, 404], body=NewMessage, media=LINES
    ),
    Operation("GET", MESSAGES, messages_api.fetch, fails=[400, 404, 409, 416]),
    Operation("POST", SESSIONS, sessions_api.create, status=201, fails=[400, 404]),
    Operation("PUT", f"{SESSION}/topics", sessions_api.put_topics, fails=[400, 404]),
    Operation("POST", PACKS, sessions_api.post_pack, status=202, fails=[400, 404], body=PackBody),
    Operation("DELETE", SESSION, sessions_api.delete, status=204, fails=[404]),
    Operation("POST", BROADCAST, sessions_api.broadcast, status=202, fails=[400], body=PackBody),
    Operation("GET", "/v1/consumers", topics_api.list_consumers),
    Operation("PUT", CONSUMER, topics_api.report, status=204, fails=[400, 409]),
    Operation("DELETE", CONSUMER, topics_api.forget, status=204, fails=[404]),
    Operation("POST", COMMITS, commits_api.commit, fails=[400, 403, 404, 409]),
    Operation("GET", f"{COMMITS}/{{producer}}", commits_api.last_commit, fails=[404]),
    Operation("POST", STAGED, commits_api.stage, fails=[400, 409, 507], media=(OCTETS,)),
    Operation("DELETE", STAGED, commits_api.unstage, status=204, fails=[400]),
    Operation("GET", "/healthz", metrics.healthz, fails=[503], produces=TEXT),
    Operation("GET", "/readyz", metrics.readyz, fails=[503], produces=TEXT),
    Operation("GET", "/metrics", metrics.metrics, produces=TEXT),
)
