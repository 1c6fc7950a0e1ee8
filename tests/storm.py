"""How long a storm test lasts. It kills, stops and replaces processes under load, then checks the sums."""

import os

STORM_S = float(os.environ.get("ONWARD_STORM_S", "20"))  # make test-more: two minutes
