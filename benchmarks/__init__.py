"""Measurements beside other libraries; results are committed, tables are made from them."""
