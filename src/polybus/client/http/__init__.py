"""The client over HTTP: `http://` and `ws://`, and blocking calls.

connection    requests on a keep-alive socket, errors     blocking   the same without a loop
sessions      /v1/sessions, and packs of a session        publisher  sending, receipts
subscription  messages of topics through a session        sources    packs by WebSocket and polls
"""
