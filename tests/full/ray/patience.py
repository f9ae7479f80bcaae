"""Patience with nodes that start on a busy machine."""

import time

from ray._private import services


def patient_get_node(gcs_address, node_id, get_node=services.get_node):
    """Wait until a node that is starting has registered, and return Ray's description of the node.

    Ray asks without a pause and gives up after 30 s, which the processes of a node can take to start on a busy machine.
    The processes of a given-up node stay, so that a second try is slower.
    """
    deadline = time.monotonic() + 240
    while True:
        try:
            return get_node(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
