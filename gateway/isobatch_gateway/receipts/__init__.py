"""Receipts: signed, hash-chained records of what was asked and answered, and their replay."""
