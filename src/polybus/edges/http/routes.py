"""Every operation of the HTTP API: method, path, function, and the types of body and answer.

The functions' docstrings are the summaries in OpenAPI. `/`, `/openapi.json` and `/msgstream` are
not operations of the API: `app` routes them.
"""

from polybus.edges.http import (
    commits_api,
    consumers_api,
    fetching,
    metrics,
    publishing,
    sessions_api,
    topics_api,
)
from polybus.edges.http.calls import OCTETS, TEXT, Operation
from polybus.edges.http.commits_api import Committed, NewCommit, PieceQuery, Staged
from polybus.edges.http.consumers_api import ConsumerList
from polybus.edges.http.fetching import FetchQuery, Messages
from polybus.edges.http.publishing import NDJSON, NewMessage, Published, PublishQuery
from polybus.edges.http.sessions_api import (
    Broadcast,
    NewSession,
    Pack,
    SessionCreated,
    SessionTopics,
)
from polybus.edges.http.topics_api import ListQuery, NewTopic, TopicDetail, TopicList, TopicState
from polybus.services.consumers.consumers import Report

TOPICS = "/v1/topics"
TOPIC = "/v1/topics/{topic}"
MESSAGES = "/v1/topics/{topic}/messages"
SESSION = "/v1/sessions/{key}"
CONSUMER = "/v1/consumers/{group}"
STAGED = "/v1/staging/{producer}/{file}"

OPERATIONS = (
    Operation("GET", TOPICS, topics_api.list_topics, TopicList, fails=[400], query=ListQuery),
    Operation(
        "POST",
        TOPICS,
        topics_api.create,
        TopicState,
        status=201,
        fails=[400, 403, 409],
        body=NewTopic,
    ),
    Operation("GET", TOPIC, topics_api.show, TopicDetail, fails=[404]),
    Operation("DELETE", TOPIC, topics_api.delete, status=204, fails=[403, 404]),
    Operation(
        "POST",
        MESSAGES,
        publishing.publish,
        Published,
        fails=[400, 403, 404],
        query=PublishQuery,
        body=NewMessage,
        media=(NDJSON, "*/*"),
    ),
    Operation(
        "GET", MESSAGES, fetching.fetch, Messages, fails=[400, 404, 409, 416], query=FetchQuery
    ),
    Operation(
        "POST",
        "/v1/sessions",
        sessions_api.create,
        SessionCreated,
        status=201,
        fails=[400, 404],
        body=NewSession,
    ),
    Operation(
        "PUT",
        f"{SESSION}/topics",
        sessions_api.put_topics,
        SessionTopics,
        fails=[400, 404],
        body=SessionTopics,
    ),
    Operation(
        "POST", f"{SESSION}/packs", sessions_api.post_pack, status=202, fails=[400, 404], body=Pack
    ),
    Operation("DELETE", SESSION, sessions_api.delete, status=204, fails=[404]),
    Operation(
        "POST",
        "/v1/broadcast",
        sessions_api.broadcast,
        Broadcast,
        status=202,
        fails=[400],
        body=Pack,
    ),
    Operation("GET", "/v1/consumers", consumers_api.list_consumers, ConsumerList),
    Operation("PUT", CONSUMER, consumers_api.report, status=204, fails=[400, 409], body=Report),
    Operation("DELETE", CONSUMER, consumers_api.forget, status=204, fails=[404]),
    Operation(
        "POST",
        "/v1/commits",
        commits_api.commit,
        Committed,
        fails=[400, 403, 404, 409],
        body=NewCommit,
    ),
    Operation("GET", "/v1/commits/{producer}", commits_api.last_commit, Committed, fails=[404]),
    Operation(
        "POST",
        STAGED,
        commits_api.stage,
        Staged,
        fails=[400, 409, 507],
        query=PieceQuery,
        media=(OCTETS,),
    ),
    Operation("DELETE", STAGED, commits_api.unstage, status=204, fails=[400]),
    Operation("GET", "/healthz", metrics.healthz, str, fails=[503], produces=TEXT),
    Operation("GET", "/readyz", metrics.readyz, str, fails=[503], produces=TEXT),
    Operation("GET", "/metrics", metrics.metrics, str, produces=TEXT),
)
