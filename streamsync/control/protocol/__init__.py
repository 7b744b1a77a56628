"""The pure state machines of versions, arming, commit and failure: events in, actions out."""
