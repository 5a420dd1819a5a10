"""Paged KV bookkeeping: pools, tables and the prefix cache. No tensors here."""
