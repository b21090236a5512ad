"""The laboratory: objectives on an enumerated model, gates on the plane of advantage and log-ratio, runs replayed."""
