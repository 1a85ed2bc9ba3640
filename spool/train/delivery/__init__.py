"""Micro-batches delivered to the ranks that train them: read once a place, mapped by all of its ranks, ahead of them.

`connect` makes a `Feed`; a reorganiser process (`reorganiser`) reads with `filling` into memory of `memory`.
"""
