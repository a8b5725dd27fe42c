"""Does drafting help here? Costs measured, speeds predicted and compared, results told."""
