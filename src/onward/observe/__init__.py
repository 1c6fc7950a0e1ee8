"""What a running application reports about itself.

reading.py     how each handler and each of its partitions is doing
health.py      whether it is ready, and the log line
readiness_news.py  what the log says when readiness changes (pure)
standstill.py  partitions that make no progress (pure)
metrics.py     families of metrics that stages add to, and the text that Prometheus reads
figures.py     readings, and what a broker counts, as families of metrics (pure)
endpoint.py    /metrics, /health/live, /health/ready and /readings over HTTP
workers.py     several processes seen as one service (pure)
"""
