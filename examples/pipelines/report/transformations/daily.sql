-- The input of report.py: one row per day and product, computed again when sales arrive.
CREATE MATERIALIZED VIEW daily AS
SELECT day, product, sum(pieces) AS pieces, sum(pieces * price) AS revenue
FROM sales
GROUP BY day, product;

CREATE MATERIALIZED VIEW best AS
SELECT day, max_by(product, revenue) AS product, max(revenue) AS revenue
FROM daily
GROUP BY day;
