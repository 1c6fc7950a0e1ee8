"""Those who consume, each run alone in a fresh process by bench.child: open, handle every event, acknowledge, end."""
