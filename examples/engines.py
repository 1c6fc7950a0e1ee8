import hashlib

from onward import Event, Onward
from onward.context import current

app = Onward("sqlite:///engines.db")


@app.handler("files", group="notify")  # async def: tasks
async def notify(event: Event) -> None:
    current().log.info("a file has arrived")


@app.handler("files", group="store", concurrency=20)  # def: threads
def store(event: Event) -> None:
    print(f"stored {event.key} under fence {current().fence}", flush=True)


@app.handler("files", group="digest", engine="processes", workers=2)  # CPU-bound
def digest(content: bytes, event: Event) -> None:
    print(f"digest {event.key} {hashlib.sha256(content).hexdigest()[:8]}", flush=True)
