"""The broker, opened once. ``langgraph dev`` runs the files of ``langgraph.json`` anew for each use; a module exists once."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: threads that spin starve each other
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # but some microseconds of it are cheaper than a sleep and a waking

from aaflow_langgraph import KVBroker
from aaflow_langgraph.assets import demo_model

HERE = Path(__file__).parent

broker = KVBroker.open(os.environ.get("AAFLOW_MODEL") or demo_model())
