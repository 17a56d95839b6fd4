"""The client over HTTP: `http://` and `ws://`, and blocking calls.

connection    requests on a keep-alive socket, errors     blocking       the same without a loop
sessions      /v1/sessions and /v1/broadcast              publisher      sending, receipts
sources       packs by WebSocket and polls                session_stream packs over all connections
subscription  messages of topics through a session
"""
