"""What a front end tells about itself: metrics, logs, traces."""
