"""Tables, figures and pages of results. Only this package converts fractions to percent and bytes to megabytes."""
