"""Attention over cached slot ranges at shifted positions: metadata and backends."""
