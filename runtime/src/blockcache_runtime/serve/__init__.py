"""A server for policies that public clients speak to: the websocket protocols of openpi and of vla-eval.

Needs the extra `serve` (websockets, msgpack). Knows nothing of how a policy computes; what it serves is a `ServedPolicy`.
"""
