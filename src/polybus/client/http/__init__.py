"""The client over HTTP: `http://` and `ws://`, and blocking calls.

connection    requests on a keep-alive socket, errors     blocking   the same without a loop
sessions      /v1/sessions, packs, subscriptions          publisher  sending, receipts
sources       packs by WebSocket and polls
"""
