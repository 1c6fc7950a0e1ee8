"""`onward relay`: publishes the events of an application's outbox."""

from typing import Annotated

import typer

from onward import signals
from onward.cli import find
from onward.cli.health import METRICS, place_of
from onward.cli.run import ApplicationArgument, Level, LogLevelOption, finish, log_to_stderr, serving_metrics


def relay(
    application: ApplicationArgument = None,
    log_level: LogLevelOption = Level.INFO,
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
    place = None if metrics is None else place_of(metrics)
    finish(app, serving_metrics(app, place, app.relay))
