"""`onward relay`: publishes the events of an application's outbox."""

import asyncio
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from onward import signals
from onward.cli import find, policy
from onward.cli.exit_limit import limit_exit
from onward.cli.health import METRICS, place_of
from onward.cli.run import Level, log_to_stderr, loop_factory
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.observe.endpoint import Address

log = logging.getLogger("onward")


def relay(
    application: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:APP",
            help="shop:app for app = Onward(...) in shop.py. Default: ONWARD_APP, or app in onward.toml.",
        ),
    ] = None,
    log_level: Annotated[Level, typer.Option(case_sensitive=False, help="The lowest level to log.")] = Level.INFO,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            envvar=METRICS,
            help="Serve /metrics, /health/live and /health/ready at this address.",
        ),
    ] = None,
) -> None:
    """Publish the events of an application's outbox until SIGTERM or Ctrl-C, without running its handlers.

    `onward run` does this too, unless outbox_relay is off. Any number of relays share the work. If one dies, the others
    take over when its lease has ended.

    \b
    Example:
      onward relay shop:app
      onward relay shop:app --metrics 9465
    """
    signals.ignore_at_exit()
    app = find.load(application or find.application("`onward relay shop:app`"))
    log_to_stderr(log_level)
    find.log_broker(app.settings.url)
    ended = limit_exit(app.settings.drain_timeout_s)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_relay(app, None if metrics is None else place_of(metrics)))
    except OnwardError:
        raise
    except Exception:  # a bug of ours or of the application: reported once, with its traceback
        log.exception("the relay ended with an error")
        raise typer.Exit(policy.NO) from None
    finally:
        ended()


async def _relay(app: "Onward", place: "Address | None") -> None:
    if place is None:
        await app.relay()
        return
    from onward.observe.endpoint import serving

    async with serving(app, place) as where:
        log.info("metrics at http://%s/metrics", where)
        await app.relay()
