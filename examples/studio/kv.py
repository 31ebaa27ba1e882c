"""The broker, opened once. ``langgraph dev`` runs the files of ``langgraph.json`` anew for each use; a module exists once."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: threads that spin starve each other

from aaflow_langgraph import KVBroker
from aaflow_langgraph.assets import demo_model

HERE = Path(__file__).parent

broker = KVBroker.open(os.environ.get("AAFLOW_MODEL") or demo_model())
