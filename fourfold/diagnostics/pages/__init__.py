"""What every page of Fourfold is made of: elements, drawings, tables, the document and its style. No network."""
