"""What a run says about itself: metrics, where they are logged, progress, tables and judges."""
