"""Tables and figures: described as plain data, drawn by Matplotlib and by the page."""
