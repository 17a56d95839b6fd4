"""The client over HTTP: `http://` and `ws://`.

connection    requests on one kept-alive socket     publisher      sending, receipts
sessions      /v1/sessions and /v1/broadcast        packs          reading message packs
sources       WebSocket and polls                   session_stream packs over all connections
subscription  messages of topics through a session
"""
