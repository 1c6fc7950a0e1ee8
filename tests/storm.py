"""How long a storm lasts: processes are killed, stopped and replaced under load, and the sums must be right."""

import os

STORM_S = float(os.environ.get("ONWARD_STORM_S", "20"))  # make test-more: two minutes
