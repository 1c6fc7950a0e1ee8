"""The programs that are compared. bench.child runs each alone in a fresh process: open, handle every event,
acknowledge, end."""
