"""Past tasks run again on their stored inputs, without writing anything, and compared with what is stored."""
