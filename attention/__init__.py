"""Attention states, spans, and the backends that compute them."""
