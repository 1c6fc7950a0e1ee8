"""How long a storm test runs. It kills, suspends and replaces processes under load, then checks every effect."""

import os

STORM_S = float(os.environ.get("ONWARD_STORM_S", "20"))  # `make test-more` sets two minutes
