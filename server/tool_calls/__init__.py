"""Tool calls: which an answer may hold, and the formats in which models write them."""
