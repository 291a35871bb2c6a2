"""Attention over slot ranges at shifted positions: plans and backends."""
