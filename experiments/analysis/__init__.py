"""From finished runs to tables and figures: `collect`, `statistics`, `tables`, `figures`."""
