from onward import Event, Onward
from onward.brokers.redis import Streams

scans = Streams("scan:events", shards=4, key="job_id", hash="md5")  # scan:events:0 to scan:events:3
app = Onward("redis://localhost:6379", streams={"scan": scans})


@app.handler("scan", group="router")
async def route(fields: dict[str, str], event: Event) -> None:
    print(f"{event.key} is {fields['stage']}, entry {event.headers['onward-stream-id']}", flush=True)
