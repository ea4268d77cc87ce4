"""Pictures of records: described once, drawn by matplotlib beside Markdown and by plotly.js on a page of HTML."""
